from opacus.accountants.utils import get_noise_multiplier

target = {"target_epsilon": 2, "target_delta": 1e-5}
print(get_noise_multiplier(**target, sample_rate=600 / 60000, epochs=10, accountant="prv"))
