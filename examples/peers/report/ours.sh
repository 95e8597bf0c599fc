accountant dataset create patients --size 60000 --epsilon 3 --delta 1e-5
RUN=$(accountant run reserve patients -b 600 -t 1000 -s 1.1)
accountant run grant "$RUN" -t 1000
accountant run commit "$RUN"
accountant report run "$RUN" --output report.html
accountant run certificate "$RUN" > certificate.json
accountant verify certificate.json
