"""Probability laws of one release: dominating pair, moments and privacy loss.

dominating_pair: a release as a pair of laws, cut into cells of its privacy loss.
gaussian: the privacy profile of the Gaussian mechanism in closed form, and its inverse.
sampled_gaussian: Rényi moments of the Poisson-sampled Gaussian mechanism, of any real order.
without_replacement: Rényi moments of the Gaussian mechanism on a fixed-size sample.
replaced_record: the pair of a Poisson-sampled Gaussian release under replace-one.
fixed_size_replacement: the pairs of releases on a fixed-size sample under replace-one.
characteristic_function: the characteristic function of one release's tilted privacy loss.
windowed_loss: the same for outcomes in smooth windows of their loss.
"""
