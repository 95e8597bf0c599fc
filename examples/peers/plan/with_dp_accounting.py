import dp_accounting
from dp_accounting.pld import PLDAccountant


def describe_run(batch_size):
    def run(noise_multiplier):
        step = dp_accounting.GaussianDpEvent(noise_multiplier)
        sampled = dp_accounting.PoissonSampledDpEvent(batch_size / 60000, step)
        return dp_accounting.SelfComposedDpEvent(sampled, 20 * 60000 // batch_size)

    return run


for batch_size in (256, 512, 1024, 2048, 4096, 8192):
    run = describe_run(batch_size)
    noise = dp_accounting.calibrate_dp_mechanism(PLDAccountant, run, 2, 1e-5)
    print(batch_size, noise, noise / batch_size)
