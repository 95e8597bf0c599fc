accountant epsilon -n 60000 -b 600 -e 10 -s 1.1 --and "-q 0.02 -t 500 -s 1.5" -d 1e-5
