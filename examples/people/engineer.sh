# An engineer has a target (ε, δ), a dataset and a compute limit: what should the job run?
accountant plan -E 2 -d 1e-5 -n 60000 -e 20 -b 256 --points 4
accountant noise-multiplier -n 60000 -b 3000 -t 400 --sampling balls_in_bins -E 2 -d 1e-5
