import opendp.prelude as dp

dp.enable_features("contrib")
space = dp.atom_domain(T=float, nan=False), dp.absolute_distance(T=float)


def release(scale):
    zcdp = space >> dp.m.then_gaussian(scale)
    return dp.c.make_fix_delta(dp.c.make_zCDP_to_approxDP(zcdp), delta=1e-5)


print(dp.binary_search_param(release, d_in=1.0, d_out=(1.0, 1e-5)))
