"""Short posts about three groups, and a model of the mean of their tokens."""

import random

import torch
from torch import nn

ABOUT = [
    ("orbit rocket moon launch", 0),
    ("goal team season match", 1),
    ("engine brake wheel road", 2),
]
FILLERS = [
    "the", "a", "of", "and", "to", "in", "is", "it", "that", "was", "for", "on", "with", "as", "at",
    "by", "from", "this", "have", "are",
]  # fmt: skip
TOKENS = sorted({word for words, _ in ABOUT for word in words.split()} | set(FILLERS))


class Posts(torch.utils.data.Dataset):
    """Posts of 12 tokens, two of them about one of three groups."""

    def __init__(self, count, start=0):
        self.count, self.start = count, start

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        draw = random.Random(self.start + index)
        words, group = draw.choice(ABOUT)
        text = draw.choices(words.split(), k=2) + draw.choices(FILLERS, k=10)
        tokens = torch.tensor([TOKENS.index(word) for word in text])
        return {"tokens": tokens, "label": torch.tensor(group)}


class MeanOfTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.last = nn.Embedding(len(TOKENS), 16), nn.Linear(16, len(ABOUT))

    def forward(self, tokens):
        return self.last(self.embedding(tokens).mean(1))
