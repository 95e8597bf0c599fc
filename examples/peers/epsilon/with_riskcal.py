from riskcal.accountants import CTDAccountant

accountant = CTDAccountant()
accountant.history = [(1.1, 600 / 60000, 1000)]
print(accountant.get_epsilon(delta=1e-5))
