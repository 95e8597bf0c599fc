from riskcal.accountants import CTDAccountant

accountant = CTDAccountant()
accountant.history = [(20, 1, 100)]
print(accountant.get_epsilon(delta=1e-5))
