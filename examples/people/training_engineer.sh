# The engineer of a training job trains on a table of numbers within a budget, and verifies the model.
mkdir -p data/visits
for file in train test; do
  for ((row = 0; row < 1000; row++)); do
    echo "$((row % 2)),$((row % 2 ? RANDOM % 9 : -RANDOM % 9)),$((RANDOM % 9))"
  done > data/visits/$file.csv
done
accountant dataset create visits --size 1000 --epsilon 4 --delta 1e-5
export ACCOUNTANT_API_KEY=$(accountant keys create --scope run --dataset visits --name job)
accountant serve &
accountant-train run --data visits --size 1000 --dataset visits --model logistic --batch-size 100 --steps 40 --noise-multiplier 1.1
accountant verify runs/visits/certificate.json --model runs/visits/model.pt
