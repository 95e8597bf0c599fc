accountant noise-multiplier --sampling none -t 1 -E 1 -d 1e-5 --json
