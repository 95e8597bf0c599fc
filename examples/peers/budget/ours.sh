accountant dataset create patients --size 60000 --epsilon 1 --delta 1e-5
accountant run reserve patients -b 600 -e 1 -s 1.1
accountant run reserve patients -b 600 -e 9 -s 1.1 || echo refused
