from opacus.accountants import PRVAccountant

accountant = PRVAccountant()
accountant.history = [(1.1, 600 / 60000, 1000)]
print(accountant.get_epsilon(delta=1e-5))
