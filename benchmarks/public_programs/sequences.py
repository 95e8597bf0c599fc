"""Programs on sequences: text, speech and time series, by recurrence, convolution and scans."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.public_programs.program import Task, program
from benchmarks.public_programs.vision import SIZE, classes_loss, labels, squared_error

WORDS = 20
POSITIONS = 7
LENGTHS = torch.tensor([7, 3, 5, 1, 7, 4])


def tokens(positions: int = POSITIONS) -> torch.Tensor:
    return torch.randint(1, WORDS, (SIZE, positions))


def padded_tokens() -> torch.Tensor:
    return tokens().masked_fill(torch.arange(POSITIONS) >= LENGTHS[:, None], 0)


def next_token_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over the tokens of each example; padding (0) does not count."""
    found = F.cross_entropy(outputs.transpose(1, 2), targets, ignore_index=0, reduction="none")
    return found.sum(1) / (targets != 0).sum(1)


class PackedLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8, padding_idx=0)
        self.rnn = nn.LSTM(8, 6, num_layers=2, bidirectional=True, batch_first=True)
        self.fc, self.dropout = nn.Linear(12, 5), nn.Dropout(0.2)

    def forward(self, text: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        embedded = self.dropout(self.embedding(text))
        packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.rnn(packed)
        return self.fc(self.dropout(torch.cat((hidden[-2], hidden[-1]), dim=1)))


@program(
    "LSTM classifier, packed",
    "bentrevett/pytorch-sentiment-analysis",
    "https://github.com/bentrevett/pytorch-sentiment-analysis",
)
def lstm_packed() -> Task:
    examples = {"text": padded_tokens(), "lengths": LENGTHS}
    return Task(PackedLstm(), examples, labels(), classes_loss)


class PaddedGru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8, padding_idx=0)
        self.gru, self.fc = nn.GRU(8, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, text: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        outputs, _ = self.gru(self.embedding(text))
        last = outputs[torch.arange(outputs.size(0)), lengths - 1]
        return self.fc(last)


@program(
    "GRU classifier, padded, last token of each",
    "huggingface/transformers",
    "https://github.com/huggingface/transformers/blob/main/src/transformers/modeling_layers.py",
)
def gru_padded() -> Task:
    examples = {"text": padded_tokens(), "lengths": LENGTHS}
    return Task(PaddedGru(), examples, labels(), classes_loss)


class BilstmTagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8, padding_idx=0)
        self.lstm = nn.LSTM(8, 6, bidirectional=True, batch_first=True)
        self.fc = nn.Linear(12, 4)

    def forward(self, text: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.embedding(text), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        output, _ = self.lstm(packed)
        padded, _ = pad_packed_sequence(output, batch_first=True, total_length=text.size(1))
        return self.fc(padded)


@program(
    "bidirectional LSTM tagger",
    "bentrevett/pytorch-pos-tagging",
    "https://github.com/bentrevett/pytorch-pos-tagging",
)
def bilstm_tagger() -> Task:
    tags = torch.randint(1, 4, (SIZE, POSITIONS)).masked_fill(
        torch.arange(POSITIONS) >= LENGTHS[:, None], 0
    )
    examples = {"text": padded_tokens(), "lengths": LENGTHS}
    return Task(BilstmTagger(), examples, tags, next_token_loss)


class Crf(nn.Module):
    """A tagger whose transitions are trained, with the partition function of each sentence."""

    def __init__(self, tags: int = 4) -> None:
        super().__init__()
        self.embedding, self.hidden2tag = nn.Embedding(WORDS, 8), nn.Linear(8, tags)
        self.start = nn.Parameter(torch.randn(tags))
        self.end = nn.Parameter(torch.randn(tags))
        self.transitions = nn.Parameter(torch.randn(tags, tags))

    def forward(self, text: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        emissions = self.hidden2tag(self.embedding(text)).transpose(0, 1)
        tags, mask = tags.transpose(0, 1), mask.transpose(0, 1)
        return self.normalizer(emissions, mask) - self.score(
            emissions, tags, mask.to(emissions.dtype)
        )

    def score(
        self, emissions: torch.Tensor, tags: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        length, batch = tags.shape
        score = self.start[tags[0]]
        score = score + emissions[0, torch.arange(batch), tags[0]]
        for i in range(1, length):
            score = score + self.transitions[tags[i - 1], tags[i]] * mask[i]
            score = score + emissions[i, torch.arange(batch), tags[i]] * mask[i]
        ends = mask.long().sum(dim=0) - 1
        return score + self.end[tags[ends, torch.arange(batch)]]

    def normalizer(self, emissions: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        score = self.start + emissions[0]
        for i in range(1, emissions.size(0)):
            following = score.unsqueeze(2) + self.transitions + emissions[i].unsqueeze(1)
            score = torch.where(mask[i].unsqueeze(1), torch.logsumexp(following, dim=1), score)
        return torch.logsumexp(score + self.end, dim=1)


@program(
    "CRF tagger",
    "kmkurn/pytorch-crf",
    "https://github.com/kmkurn/pytorch-crf/blob/master/torchcrf/__init__.py",
)
def crf_tagger() -> Task:
    mask = torch.arange(POSITIONS) < LENGTHS[:, None]
    examples = {"text": padded_tokens(), "tags": torch.randint(4, (SIZE, POSITIONS)), "mask": mask}
    return Task(Crf(), examples, labels(), lambda found, _: found)


class AttentionDecoder(nn.Module):
    """An encoder and a decoder that attends to it, one word after the other."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.query, self.keys, self.energy = (
            nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 1),
        )  # fmt: skip
        self.decoder_embedding = nn.Embedding(WORDS, width)
        self.decoder, self.out = nn.GRU(2 * width, width, batch_first=True), nn.Linear(width, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        encoded, hidden = self.encoder(self.embedding(source))
        word = torch.empty(source.size(0), 1, dtype=torch.long).fill_(1)
        found = []
        for i in range(target.size(1)):
            embedded = self.decoder_embedding(word)
            query = hidden.permute(1, 0, 2)
            scores = self.energy(torch.tanh(self.query(query) + self.keys(encoded)))
            weights = F.softmax(scores.squeeze(2).unsqueeze(1), dim=-1)
            context = torch.bmm(weights, encoded)
            output, hidden = self.decoder(torch.cat((embedded, context), dim=2), hidden)
            found.append(self.out(output))
            word = target[:, i].unsqueeze(1)  # teacher forcing
        return F.log_softmax(torch.cat(found, dim=1), dim=-1)


@program(
    "seq2seq with attention, teacher forcing",
    "PyTorch tutorials",
    "https://github.com/pytorch/tutorials/blob/main/intermediate_source/seq2seq_translation_tutorial.py",
)
def seq2seq_attention() -> Task:
    target = tokens(5)

    def loss(outputs: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(outputs.transpose(1, 2), truth, reduction="none").mean(1)

    return Task(AttentionDecoder(), {"source": tokens(), "target": target}, target, loss)


class CharRnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(WORDS, 8), nn.GRU(8, 8, 2)
        self.decoder = nn.Linear(8, WORDS)

    def step(self, given: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch_size = given.size(0)
        output, hidden = self.rnn(self.encoder(given).view(1, batch_size, -1), hidden)
        return self.decoder(output.view(batch_size, -1)), hidden

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(2, text.size(0), 8, dtype=self.decoder.weight.dtype)
        outputs = []
        for c in range(text.size(1)):
            output, hidden = self.step(text[:, c], hidden)
            outputs.append(output)
        return torch.stack(outputs, 1)


@program(
    "char-RNN, positions first",
    "spro/char-rnn.pytorch",
    "https://github.com/spro/char-rnn.pytorch/blob/master/model.py",
)
def char_rnn() -> Task:
    return Task(CharRnn(), tokens(), tokens(), next_token_loss)


class TextCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.convs = nn.ModuleList([nn.Conv2d(1, 4, (k, 8)) for k in (2, 3, 4)])
        self.dropout, self.fc1 = nn.Dropout(0.3), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).unsqueeze(1)
        found = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        found = [F.max_pool1d(i, i.size(2)).squeeze(2) for i in found]
        return self.fc1(self.dropout(torch.cat(found, 1)))


@program(
    "TextCNN",
    "Shawn1993/cnn-text-classification-pytorch",
    "https://github.com/Shawn1993/cnn-text-classification-pytorch/blob/master/model.py",
)
def text_cnn() -> Task:
    return Task(TextCnn(), tokens(), labels(), classes_loss)


@program(
    "fastText, bags of words",
    "PyTorch tutorials",
    "https://github.com/pytorch/text/blob/main/examples/text_classification/model.py",
)
def fasttext_bag() -> Task:
    model = nn.Sequential(nn.EmbeddingBag(WORDS, 8, mode="mean", padding_idx=0), nn.Linear(8, 5))
    return Task(model, padded_tokens(), labels(), classes_loss)


class SkipGram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u_embeddings, self.v_embeddings = nn.Embedding(WORDS, 8), nn.Embedding(WORDS, 8)
        nn.init.uniform_(self.u_embeddings.weight, -0.5, 0.5)

    def forward(
        self, pos_u: torch.Tensor, pos_v: torch.Tensor, neg_v: torch.Tensor
    ) -> torch.Tensor:
        emb_u, emb_v = self.u_embeddings(pos_u), self.v_embeddings(pos_v)
        emb_neg_v = self.v_embeddings(neg_v)
        score = torch.sum(torch.mul(emb_u, emb_v), dim=1)
        score = -F.logsigmoid(torch.clamp(score, max=10, min=-10))
        neg_score = torch.bmm(emb_neg_v, emb_u.unsqueeze(2)).squeeze(2)
        neg_score = torch.clamp(neg_score, max=10, min=-10)
        return score - torch.sum(F.logsigmoid(-neg_score), dim=1)


@program(
    "word2vec skip-gram, negatives of each record",
    "Andras7/word2vec-pytorch",
    "https://github.com/Andras7/word2vec-pytorch/blob/master/word2vec/model.py",
)
def word2vec() -> Task:
    examples = {
        "pos_u": torch.randint(WORDS, (SIZE,)), "pos_v": torch.randint(WORDS, (SIZE,)),
        "neg_v": torch.randint(WORDS, (SIZE, 4)),
    }  # fmt: skip
    return Task(SkipGram(), examples, labels(), lambda found, _: found)


class DeepSpeech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 4, (5, 3), stride=(2, 1), padding=(2, 1)), nn.Hardtanh(0, 20, inplace=True)
        )
        self.rnn, self.fc = nn.LSTM(20, 8, bidirectional=True, batch_first=True), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        sizes = x.size()
        x = x.view(sizes[0], sizes[1] * sizes[2], sizes[3]).transpose(1, 2).contiguous()
        return self.fc(self.rnn(x)[0])


@program(
    "CTC speech model",
    "SeanNaren/deepspeech.pytorch",
    "https://github.com/SeanNaren/deepspeech.pytorch/blob/master/deepspeech_pytorch/model.py",
)
def ctc_speech() -> Task:
    targets = {
        "labels": torch.randint(1, 6, (SIZE, 4)), "lengths": torch.tensor([4, 2, 3, 1, 4, 3]),
        "frames": torch.tensor([12, 9, 12, 7, 11, 12]),
    }  # fmt: skip

    def loss(outputs: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        logs = outputs.transpose(0, 1).log_softmax(-1)
        return F.ctc_loss(
            logs, target["labels"], target["frames"], target["lengths"], reduction="none",
            zero_infinity=True,
        )  # fmt: skip

    return Task(DeepSpeech(), torch.randn(SIZE, 1, 10, 12), targets, loss)


class LayerDrop(nn.Module):
    """A wave encoder whose transformer layers are left out at random."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(1, width, 5, 3), nn.GroupNorm(width, width), nn.GELU())
        self.pos_conv = weight_norm(nn.Conv1d(width, width, 4, padding=2, groups=2), dim=2)
        self.layers = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(
                    width, 2, 12, 0.0, "gelu", batch_first=True, norm_first=True
                )
                for _ in range(3)
            ]
        )
        self.fc = nn.Linear(width, 5)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        x = self.conv(wave)
        x = (x + self.pos_conv(x)[:, :, :-1]).transpose(1, 2)
        for layer in self.layers:
            dropout_probability = torch.rand([])
            if not self.training or dropout_probability > 0.3:
                x = layer(x)
        return self.fc(x.mean(1))


@program(
    "wav2vec 2.0 with layer drop",
    "facebookresearch/fairseq",
    "https://github.com/facebookresearch/fairseq/blob/main/fairseq/models/wav2vec/wav2vec2.py",
)
def wav2vec_layer_drop() -> Task:
    return Task(LayerDrop(), torch.randn(SIZE, 1, 30), labels(), classes_loss)


class TemporalBlock(nn.Module):
    def __init__(self, inside: int, outside: int, dilation: int) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.conv1 = weight_norm(nn.Conv1d(inside, outside, 3, padding=self.pad, dilation=dilation))
        self.conv2 = weight_norm(
            nn.Conv1d(outside, outside, 3, padding=self.pad, dilation=dilation)
        )
        self.down = nn.Conv1d(inside, outside, 1) if inside != outside else None
        self.dropout = nn.Dropout(0.1)

    def chomp(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, : -self.pad].contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.dropout(F.relu(self.chomp(self.conv1(x))))
        out = self.dropout(F.relu(self.chomp(self.conv2(out))))
        return F.relu(out + (x if self.down is None else self.down(x)))


class Tcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.linear = (
            nn.Sequential(TemporalBlock(3, 6, 1), TemporalBlock(6, 6, 2)),
            nn.Linear(6, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.net(x)[:, :, -1])


@program(
    "TCN, weight_norm",
    "locuslab/TCN",
    "https://github.com/locuslab/TCN/blob/master/TCN/tcn.py",
)
def tcn_weight_norm() -> Task:
    return Task(Tcn(), torch.randn(SIZE, 3, 12), labels(), classes_loss)


class Spectrogram(nn.Module):
    window: torch.Tensor
    filters: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.register_buffer("filters", torch.rand(9, 6))
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(16, 5)
        )

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        found = torch.stft(
            wave, 16, hop_length=8, window=self.window, center=True, pad_mode="reflect",
            normalized=False, onesided=True, return_complex=True,
        )  # fmt: skip
        mel = torch.matmul(found.abs().pow(2.0).transpose(-1, -2), self.filters).transpose(-1, -2)
        return self.net(torch.log(mel + 1e-6).unsqueeze(1))


@program(
    "keyword spotting from spectrograms (stft)",
    "pytorch/audio",
    "https://github.com/pytorch/audio/blob/main/src/torchaudio/functional/functional.py",
)
def spectrogram() -> Task:
    return Task(Spectrogram(), torch.randn(SIZE, 80), labels(), classes_loss)


class SelectiveScan(nn.Module):
    """A block of Mamba: the state's step, input and output depend on the token."""

    def __init__(self, width: int = 8, state: int = 4) -> None:
        super().__init__()
        inner = 2 * width
        self.state = state
        self.norm = nn.RMSNorm(width)
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj = nn.Linear(inner, 1 + 2 * state, bias=False)
        self.dt_proj = nn.Linear(1, inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1, state + 1).float().repeat(inner, 1)))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept, length = x, x.shape[1]
        x, res = self.in_proj(self.norm(x)).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[:, :, :length].transpose(1, 2))
        return kept + self.out_proj(self.ssm(x) * F.silu(res))

    def ssm(self, x: torch.Tensor) -> torch.Tensor:
        a = -torch.exp(self.A_log.to(x.dtype))
        delta, b, c = self.x_proj(x).split([1, self.state, self.state], dim=-1)
        delta = F.softplus(self.dt_proj(delta))
        delta_a = torch.exp(torch.einsum("bld,dn->bldn", delta, a))
        delta_b = torch.einsum("bld,bln,bld->bldn", delta, b, x)
        h, found = torch.zeros_like(delta_b[:, 0]), []
        for i in range(x.shape[1]):
            h = delta_a[:, i] * h + delta_b[:, i]
            found.append(torch.einsum("bdn,bn->bd", h, c[:, i, :]))
        return torch.stack(found, dim=1) + x * self.D


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.layers, self.norm_f = nn.Sequential(SelectiveScan(), SelectiveScan()), nn.RMSNorm(8)
        self.lm_head = nn.Linear(8, WORDS, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm_f(self.layers(self.embedding(ids))))


@program(
    "Mamba, selective scan, tied",
    "johnma2006/mamba-minimal",
    "https://github.com/johnma2006/mamba-minimal/blob/master/model.py",
)
def mamba_scan() -> Task:
    return Task(Mamba(), tokens(), tokens(), next_token_loss)


class RevIn(nn.Module):
    """A linear forecast of each series, standardised by itself."""

    def __init__(self, features: int = 3) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(features)),
            nn.Parameter(torch.zeros(features)),
        )
        self.trend, self.season = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = torch.mean(x, dim=1, keepdim=True).detach()
        stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5).detach()
        x = (x - mean) / stdev * self.weight + self.bias
        x = x.permute(0, 2, 1)
        trend = F.avg_pool1d(F.pad(x, (1, 1), mode="replicate"), 3, 1)
        found = (self.trend(trend) + self.season(x - trend)).permute(0, 2, 1)
        return (found - self.bias) / (self.weight + 1e-5) * stdev + mean


@program(
    "reversible instance norm, DLinear",
    "ts-kim/RevIN",
    "https://github.com/ts-kim/RevIN/blob/master/RevIN.py",
)
def revin_forecast() -> Task:
    return Task(RevIn(), torch.randn(SIZE, 12, 3) * 3 + 1, torch.randn(SIZE, 4, 3), squared_error)


class DeepAr(nn.Module):
    """A forecast of mean and deviation, one step after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(9, 3), nn.LSTM(5, 8, 2)
        self.mu, self.presigma = nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, series: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x, batch = series.permute(1, 0, 2), series.size(0)
        idx = ids.unsqueeze(0)
        hidden = torch.zeros(2, batch, 8, dtype=series.dtype)
        cell = torch.zeros(2, batch, 8, dtype=series.dtype)
        total = torch.zeros(batch, dtype=series.dtype)
        for t in range(x.size(0) - 1):
            given = torch.cat((x[t].unsqueeze_(0), self.embedding(idx)), dim=2)
            _, (hidden, cell) = self.lstm(given, (hidden, cell))
            flat = hidden.permute(1, 2, 0).contiguous().view(hidden.shape[1], -1)
            mu, sigma = self.mu(flat), F.softplus(self.presigma(flat))
            normal = torch.distributions.normal.Normal(mu.squeeze(1), sigma.squeeze(1))
            total = total - normal.log_prob(x[t + 1, :, 0])
        return total


@program(
    "DeepAR, Gaussian likelihood",
    "zhykoties/TimeSeries",
    "https://github.com/zhykoties/TimeSeries/blob/master/model/net.py",
)
def deep_ar() -> Task:
    examples = {"series": torch.randn(SIZE, 6, 2), "ids": torch.randint(9, (SIZE,))}
    return Task(DeepAr(), examples, labels(), lambda found, _: found)


class NBeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 14)) for _ in range(3)]
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        residuals = x.flip(dims=(1,))
        mask = mask.flip(dims=(1,))
        forecast = x[:, -1:]
        for block in self.blocks:
            backcast, block_forecast = block(residuals).split([10, 4], dim=1)
            residuals = (residuals - backcast) * mask
            forecast = forecast + block_forecast
        return forecast


@program(
    "N-BEATS",
    "ServiceNow/N-BEATS",
    "https://github.com/ServiceNow/N-BEATS/blob/master/models/nbeats.py",
)
def n_beats() -> Task:
    def loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        weights = torch.nan_to_num(1.0 / (outputs.abs() + target.abs()).detach())
        return 200 * ((outputs - target).abs() * weights).mean(1)

    examples = {"x": torch.randn(SIZE, 10), "mask": (torch.rand(SIZE, 10) < 0.9).float()}
    return Task(NBeats(), examples, torch.randn(SIZE, 4), loss)
