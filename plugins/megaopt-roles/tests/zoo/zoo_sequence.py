"""Taggers, translators, trees and memories, and what each of their parameters is."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from megaopt_core.params import MatrixView, Role

E, O, X = Role.EMBEDDING, Role.OUTPUT, Role.ELEMENTWISE  # noqa: E741 - a table of one-letter roles reads best
M, T = MatrixView(), MatrixView(transposed=True)


def split(*sizes: int, **view: Any) -> MatrixView:
    """Return a split view."""
    return MatrixView(split_sizes=sizes, **view)


class CRF(nn.Module):
    def __init__(self, tags: int = 5) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.empty(tags, tags))
        self.start_transitions = nn.Parameter(torch.empty(tags))

    def forward(self, emissions: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        score = self.start_transitions[tags[0]] + emissions[0, torch.arange(2), tags[0]]
        total = self.start_transitions + emissions[0]
        for i in range(1, emissions.size(0)):
            score = score + self.transitions[tags[i - 1], tags[i]] + emissions[i, torch.arange(2), tags[i]]
            total = torch.logsumexp(total.unsqueeze(2) + self.transitions + emissions[i].unsqueeze(1), dim=1)
        return torch.logsumexp(total, dim=1) - score


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeds = nn.Embedding(40, 8)
        self.lstm = nn.LSTM(8, 6, bidirectional=True)
        self.hidden2tag = nn.Linear(12, 5)
        self.crf = CRF()

    def forward(self, sentence: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(self.word_embeds(sentence))
        return self.crf(self.hidden2tag(out), tags)


class AdditiveAttention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.Wa, self.Ua, self.Va = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, 1)

    def forward(self, query: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys))).squeeze(2).unsqueeze(1)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights, keys), weights


class AttentionDecoder(nn.Module):
    def __init__(self, size: int = 8, vocab: int = 40) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, size)
        self.attention = AdditiveAttention(size)
        self.gru = nn.GRU(2 * size, size, batch_first=True)
        self.out = nn.Linear(size, vocab)

    def forward(
        self, encoder_outputs: torch.Tensor, hidden: torch.Tensor, target: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        token = torch.zeros(encoder_outputs.size(0), 1, dtype=torch.long)
        outputs = []
        for i in range(4):
            output, hidden, _ = self.step(token, hidden, encoder_outputs)
            outputs.append(output)
            token = (
                target[:, i].unsqueeze(1) if target is not None else output.topk(1)[1].squeeze(-1).detach()
            )
        return F.log_softmax(torch.cat(outputs, dim=1), dim=-1), hidden

    def step(
        self, token: torch.Tensor, hidden: torch.Tensor, encoder_outputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        embedded = F.dropout(self.embedding(token))
        context, weights = self.attention(hidden.permute(1, 0, 2), encoder_outputs)
        output, hidden = self.gru(torch.cat((embedded, context), dim=2), hidden)
        return self.out(output), hidden, weights


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.decoder = AttentionDecoder()

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        outputs, hidden = self.gru(self.embedding(source))
        return self.decoder(outputs, hidden, target)[0]


class PointerNetwork(nn.Module):
    """Its output is a choice among its inputs: the scores come from a vector of weights."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(2, size)
        self.encoder = nn.LSTM(size, size, batch_first=True)
        self.cell = nn.LSTMCell(size, size)
        self.W1, self.W2 = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        self.vt = nn.Linear(size, 1, bias=False)
        self.start = nn.Parameter(torch.zeros(1, size))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        memory, (h, c) = self.encoder(self.embed(points))
        h, c = h[-1], c[-1]
        x = self.start.expand(points.size(0), -1)
        pointers = []
        for _ in range(points.size(1)):
            h, c = self.cell(x, (h, c))
            scores = self.vt(torch.tanh(self.W1(memory) + self.W2(h).unsqueeze(1))).squeeze(-1)
            pointers.append(F.log_softmax(scores, dim=-1))
            x = memory[torch.arange(points.size(0)), scores.argmax(-1)]
        return torch.stack(pointers, dim=1)


class TreeLSTM(nn.Module):
    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.emb = nn.Embedding(40, size)
        self.W_iou = nn.Linear(size, 3 * size, bias=False)
        self.U_iou = nn.Linear(2 * size, 3 * size, bias=False)
        self.b_iou = nn.Parameter(torch.zeros(1, 3 * size))
        self.U_f = nn.Linear(2 * size, 2 * size)
        self.classifier = nn.Linear(size, 5)

    def node(self, iou: torch.Tensor, c: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
        i, o, u = torch.chunk(iou + self.b_iou, 3, 1)
        c = torch.sigmoid(i) * torch.tanh(u) + c
        return torch.sigmoid(o) * torch.tanh(c), c

    def forward(self, words: torch.Tensor, levels: Iterable[torch.Tensor]) -> torch.Tensor:
        h, c = self.node(self.W_iou(self.emb(words)), 0)
        for children in levels:
            h_cat = h[children].flatten(1)
            f = torch.sigmoid(self.U_f(h_cat)).view(-1, 2, 8)
            h, c = self.node(self.U_iou(h_cat), torch.sum(f * c[children], 1))
        return self.classifier(h)


class NeuralTuringMachine(nn.Module):
    def __init__(
        self, inputs: int = 6, size: int = 16, cells: int = 10, width: int = 4, outputs: int = 6
    ) -> None:
        super().__init__()
        self.width = width
        self.memory_bias = nn.Parameter(torch.zeros(cells, width))
        self.initial_read = nn.Parameter(torch.zeros(1, width))
        self.controller = nn.LSTMCell(inputs + width, size)
        self.read_params = nn.Linear(size, width + 1)
        self.write_params = nn.Linear(size, 3 * width + 1)
        self.out = nn.Linear(size + width, outputs)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        memory = self.memory_bias.clone().repeat(sequence.size(1), 1, 1)
        read = self.initial_read.expand(sequence.size(1), -1)
        state, outputs = None, []
        for x in sequence:
            state = self.controller(torch.cat([x, read], dim=1), state)
            h = state[0]
            key, beta = torch.split(self.read_params(h), [self.width, 1], dim=1)
            w = F.softmax(F.softplus(beta) * F.cosine_similarity(memory, key.unsqueeze(1), dim=-1), dim=1)
            k, beta, erase, add = torch.split(
                self.write_params(h), [self.width, 1, self.width, self.width], dim=1
            )
            ww = F.softmax(F.softplus(beta) * F.cosine_similarity(memory, k.unsqueeze(1), dim=-1), dim=1)
            memory = memory * (1 - ww.unsqueeze(-1) * torch.sigmoid(erase).unsqueeze(1))
            memory = memory + ww.unsqueeze(-1) * add.unsqueeze(1)
            read = torch.matmul(w.unsqueeze(1), memory).squeeze(1)
            outputs.append(self.out(torch.cat([h, read], dim=1)))
        return torch.stack(outputs)


class TextCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)
        self.static = nn.Embedding.from_pretrained(torch.zeros(40, 8), freeze=False)
        self.convs = nn.ModuleList([nn.Conv2d(1, 4, (k, 16)) for k in (3, 4)])
        self.fc = nn.Linear(8, 3)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.embedding(text), self.static(text)], dim=-1).unsqueeze(1)
        x = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        x = torch.cat([F.max_pool1d(i, i.size(2)).squeeze(2) for i in x], 1)
        return self.fc(F.dropout(x, training=self.training))


class SkipGram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_embed, self.out_embed = nn.Embedding(40, 8, sparse=True), nn.Embedding(40, 8, sparse=True)

    def forward(self, center: torch.Tensor, context: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        v = self.in_embed(center)
        positive = F.logsigmoid((v * self.out_embed(context)).sum(-1))
        return -(
            positive + F.logsigmoid(-torch.bmm(self.out_embed(negative), v.unsqueeze(2)).squeeze(2)).sum(1)
        )


EXPECTED = {
    "tagger with a CRF": (
        Tagger,
        {
            "word_embeds.weight": E,
            **{f"lstm.weight_{k}_l0{d}": split(6, 6, 6, 6) for k in ("ih", "hh") for d in ("", "_reverse")},
            "hidden2tag.weight": O,
            "crf.transitions": E,
        },
    ),
    "additive attention": (
        Translator,
        {
            "embedding.weight": E,
            **{f"{g}.weight_{k}_l0": split(8, 8, 8) for g in ("gru", "decoder.gru") for k in ("ih", "hh")},
            "decoder.embedding.weight": E,
            **{f"decoder.attention.{name}.weight": M for name in ("Wa", "Ua")},
            "decoder.attention.Va.weight": M,
            "decoder.out.weight": O,
        },
    ),
    "pointer network": (
        PointerNetwork,
        {
            "start": X,
            "embed.weight": M,
            **{f"encoder.weight_{k}_l0": split(8, 8, 8, 8) for k in ("ih", "hh")},
            **{f"cell.weight_{k}": split(8, 8, 8, 8) for k in ("ih", "hh")},
            "W1.weight": M,
            "W2.weight": M,
            "vt.weight": O,
        },
    ),
    "tree": (
        TreeLSTM,
        {
            "b_iou": X,
            "emb.weight": E,
            "W_iou.weight": split(8, 8, 8),
            "U_iou.weight": split(8, 8, 8),
            "U_f.weight": M,
            "classifier.weight": O,
        },
    ),
    "memory": (
        NeuralTuringMachine,
        {
            "memory_bias": X,
            "initial_read": X,
            "controller.weight_ih": split(16, 16, 16, 16),
            "controller.weight_hh": split(16, 16, 16, 16),
            "read_params.weight": split(4, 1),
            "write_params.weight": split(4, 1, 4, 4),
            "out.weight": O,
        },
    ),
    "text by convolutions": (
        TextCNN,
        {"embedding.weight": E, "static.weight": E, "convs.0.weight": M, "convs.1.weight": M, "fc.weight": O},
    ),
    "skip-gram": (SkipGram, {"in_embed.weight": E, "out_embed.weight": E}),
}
