accountant dataset create patients -n 60000 -E 3 -d 1e-5
accountant run reserve patients -b 600 -t 3000 -s 1.1
accountant run reserve patients -b 600 -t 3000 -s 1.1 --json || true
