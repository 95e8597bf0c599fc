from riskcal.accountants import CTDAccountant
from riskcal.calibration import find_noise_multiplier_for_epsilon_delta

for batch_size in (256, 512, 1024, 2048, 4096, 8192):
    noise = find_noise_multiplier_for_epsilon_delta(
        CTDAccountant,
        epsilon=2,
        delta=1e-5,
        sample_rate=batch_size / 60000,
        num_steps=20 * 60000 // batch_size,
    )
    print(batch_size, noise, noise / batch_size)
