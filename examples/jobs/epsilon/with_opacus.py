from opacus.accountants import PRVAccountant

accountant = PRVAccountant()
for _ in range(1000):
    accountant.step(noise_multiplier=1.1, sample_rate=600 / 60000)
print(accountant.get_epsilon(1e-5))
