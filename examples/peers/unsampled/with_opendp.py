import opendp.prelude as dp

dp.enable_features("contrib")
space = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.l2_distance(T=float)
release = space >> dp.m.then_gaussian(scale=20.0)
releases = dp.c.make_zCDP_to_approxDP(dp.c.make_composition([release] * 100))
print(releases.map(1.0).epsilon(1e-5))
