from riskcal.accountants import CTDAccountant

accountant = CTDAccountant()
accountant.history = [(1.1, 0.01, 1000), (1.5, 0.02, 500)]
print(accountant.get_epsilon(delta=1e-5))
