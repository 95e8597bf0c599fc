# A privacy officer gives a dataset a budget, limits a team, and signs a report of what was released.
accountant dataset create patients --size 60000 --epsilon 3 --delta 1e-5 --unit person
accountant caps set patients --team vision --share 0.5
accountant dataset quote patients -b 600 -t 1000 -s 1.1
# A training job would make these two calls itself.
RUN=$(accountant run reserve patients -b 600 -t 1000 -s 1.1 --purpose 'first model')
accountant run grant "$RUN" -t 1000
accountant run commit "$RUN" --clip-norm 1
accountant dataset show patients
accountant report dataset patients --output report.html
accountant report run "$RUN" --output registry.yaml
