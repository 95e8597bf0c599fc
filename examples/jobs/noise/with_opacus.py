from opacus.accountants.utils import get_noise_multiplier

sigma = get_noise_multiplier(
    target_epsilon=2,
    target_delta=1e-5,
    sample_rate=600 / 60000,
    steps=1000,
    accountant="prv",
)
print(sigma)
