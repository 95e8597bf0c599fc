# An operator sets up the ledger, creates and replaces keys, and checks the record.
accountant db upgrade
accountant dataset create patients --size 60000 --epsilon 3 --delta 1e-5
OLD=$(accountant keys create --scope run --dataset patients --name trainer --team vision)
accountant serve &
until ACCOUNTANT_API_KEY=$OLD accountant dataset list; do sleep 1; done
accountant keys create --scope run --dataset patients --name trainer-2 --team vision
accountant keys list
accountant keys revoke "$(echo "$OLD" | cut -d_ -f2)"
accountant ledger events
accountant ledger export > ledger.jsonl
accountant ledger verify
