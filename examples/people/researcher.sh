# A researcher asks what a run costs, checks a paper's number, and chooses the noise of the next run.
accountant epsilon -n 60000 -b 600 -e 10 -s 1.1 -d 1e-5
accountant compare -n 60000 -b 600 -e 10 -s 1.1 -d 1e-5
accountant noise-multiplier -n 60000 -b 600 -e 10 -E 2 -d 1e-5
