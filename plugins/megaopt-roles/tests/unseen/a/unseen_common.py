"""Helpers of this set: write what is expected by name pattern, get one entry per trainable parameter.

A view is None (plain: the stored tensor is the matrix, or a convolution `[out, in*k]`) or a dict:
  dim          MatrixView.split_dim (0 rows = outputs, 1 columns = inputs), meaningful with sizes
  sizes        MatrixView.split_sizes as a list; [] = not split
  interleaved  True where the sizes repeat (sum(sizes) < extent)
  transposed   MatrixView.transposed
  batched      True where batch_dims > 0 (batch_dims key is added where it is not 1)
  first_dims   only where it is not 1
Parameters of one dimension that no pattern names are elementwise.
"""
from fnmatch import fnmatchcase


def view(sizes=(), *, dim=0, interleaved=False, transposed=False, batched=False, **more):
    return dict(dim=dim, sizes=list(sizes), interleaved=interleaved, transposed=transposed, batched=batched, **more)


T = view(transposed=True)
M = ("matrix", None)
EMB = ("embedding", None)
OUT = ("output", None)
EL = ("elementwise", None)
A = "arguable"


def mat(sizes=(), **kw):
    return ("matrix", view(sizes, **kw))


def arg(decision):
    return (*decision, A)


def expect(factory, rules):
    """First pattern that fits a name decides; a pattern that fits nothing, or a 2-D parameter without one, is an error."""
    names = {n: p for n, p in factory().named_parameters() if p.requires_grad}
    used, out = set(), {}
    for name, p in names.items():
        for pattern, decision in rules.items():
            if fnmatchcase(name, pattern):
                used.add(pattern)
                out[name] = decision
                break
        else:
            if p.dim() > 1:
                raise LookupError(f"{factory}: nothing said about {name} {tuple(p.shape)}")
            out[name] = EL
    if unused := set(rules) - used:
        raise LookupError(f"{factory}: patterns that fit nothing: {unused}")
    return out
