accountant plan -E 2 -d 1e-5 -n 60000 -e 20 --sampling poisson --points 6
