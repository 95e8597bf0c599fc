from opacus.accountants import PRVAccountant

accountant = PRVAccountant()
accountant.history = [(20, 1, 100)]
print(accountant.get_epsilon(delta=1e-5))
