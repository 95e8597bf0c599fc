accountant noise-multiplier -n 60000 -b 600 -e 10 -E 2 -d 1e-5 --json
