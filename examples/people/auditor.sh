# An auditor is given a certificate, a model, a claim of another tool and a ledger, and checks each.
# What the auditor is given:
echo 'weights' > model.pt
accountant dataset create patients --size 60000 --epsilon 3 --delta 1e-5 > given.txt
RUN=$(accountant run reserve patients -b 600 -t 1000 -s 1.1)
accountant run grant "$RUN" -t 1000 >> given.txt
accountant run commit "$RUN" --clip-norm 1 --model model.pt >> given.txt
accountant run certificate "$RUN" --output certificate.json
# What the auditor does:
accountant verify certificate.json --model model.pt
accountant report certificate.json --format nist --output questions.md
echo 'LocalDpMod(clipping_norm=1.0, sensitivity=2.0, epsilon=10.0, delta=1e-5)' | accountant import - || echo 'the claim has a fault'
accountant ledger verify
