"""Certified numbers: pure functions on floats and arrays, independent of all other packages.

Every bound is proved: each error of an approximation, a truncation or of floating point is bounded
and added outward.

Layers. Each imports only those below it (import contract in `pyproject.toml`):

    trade_off, epsilon_curve    the trade-off function; ε after each of many numbers of steps
    domination                  whether one composition dominates another
    privacy_profile             δ at many ε, and for many numbers of repetitions
    upper_bound                 an upper bound on ε alone, for searches
    certified_interval          chooses engines and settings until the interval is narrow enough
    engines/                    each bounds δ(ε) of a composition from both sides
    laws/, renyi_conversion     one release's pair, moments, and characteristic function
    floats/                     special functions, directed rounding, searches, intervals
    errors, time_limit          the errors that these modules raise, and a limit of CPU time

Engines, with their proofs in `docs/accountants/pld.md`:

    engine              used                                    section of the proof
    ------------------  --------------------------------------  --------------------
    line_integral       first: most Gaussian compositions       The contour
    rare_events         for few or rarely sampled Gaussian      Rare events
                        releases, where the first decays slowly
    fft_lattice         for all else, such as Laplace noise and The lattice
                        records replaced in fixed-size samples;
                        made finer by `lattice_refinement`
    small_noise         by the accountant `pld`, before all     Little noise
                        others, if the noise is very little
    saddle_point        before every engine: the Rényi bound,   The contour
                        and where to be accurate

Error budgets are counted in the code that adds them, and each term is tested: with a fault of its
kind the bounds hold only while the term is there. `tests/mutants` removes each term in turn.

    engine              error terms added in                    tests in tests/unit/
    ------------------  --------------------------------------  -------------------------
    line_integral       `CompositionIntegrand.values`,          test_error_terms.py,
                        `_choose_frequencies`, `_fourier_sum`,  test_line_integral.py
                        `EvaluatedIntegral`
    rare_events         `_RareOutcomeIntegrand.values`,             test_error_terms.py,
                        `DividedComposition.omitted`            test_rare_events.py
    fft_lattice         `upper_profile`, `lower_profile`,       test_error_terms.py,
                        `_compose`, `floats.convolution`        test_certified_interval.py
    small_noise         `_SmallNoiseProfile`                    test_small_noise.py
    saddle_point        `laws.sampled_gaussian.log_moments`     test_numerics.py
                        `ReplacedRecord.log_moments`            test_replaced_record.py
                        `FixedSizeReplacement.log_moments`      test_fixed_size_replacement.py
                        `ReplacedPersonPair.log_moments`        test_replaced_person.py
    laws.lognormal_sum  `_BestBounds`, `_ClassMoments`,         test_balls_in_bins.py
                        `compose_class`, `sum_above`,       test_complex_balls.py
                        `_sum_blocks`, `_bound_wrapped`,
                        `floats.complex_balls`
    laws.lognormal_cells `cell_masses`                          test_lognormal_cells.py
"""
