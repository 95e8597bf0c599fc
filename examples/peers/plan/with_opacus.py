from opacus.accountants.utils import get_noise_multiplier

target = {"target_epsilon": 2, "target_delta": 1e-5}
for batch_size in (256, 512, 1024, 2048, 4096, 8192):
    noise = get_noise_multiplier(
        **target, sample_rate=batch_size / 60000, epochs=20, accountant="prv"
    )
    print(batch_size, noise, noise / batch_size)
