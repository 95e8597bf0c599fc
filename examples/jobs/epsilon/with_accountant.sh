accountant epsilon -n 60000 -b 600 -e 10 -s 1.1 -d 1e-5 --json
