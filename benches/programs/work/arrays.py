"""Arrays, frames or models: argv[1] is numpy, pandas, sklearn or torch. Prints checksums."""

import hashlib
import sys


def numpy() -> object:
    import numpy as np

    rng = np.random.default_rng(0)
    total = np.zeros(())
    for size in range(1, 400):
        block = rng.standard_normal((size, 500))
        total = total + (block @ block.T).sum() + np.sort(block, axis=1)[:, 0].sum()
    grown = np.zeros(1)
    for size in range(1, 60):
        grown = np.concatenate([grown, np.full(size * 20_000, size)])
    return total.tobytes() + grown.tobytes()


def pandas() -> object:
    import numpy as np
    import pandas as pd

    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"k": rng.integers(0, 5000, 500_000), "v": rng.random(500_000)})
    frame["s"] = frame.k.astype(str)
    joined = frame.merge(frame.groupby("k").v.mean().rename("m"), on="k").sort_values(["s", "v"])
    return joined.to_csv(index=False).encode()


def sklearn() -> object:
    from sklearn.datasets import make_classification
    from sklearn.ensemble import RandomForestClassifier

    x, y = make_classification(4000, 30, random_state=0)
    return RandomForestClassifier(60, random_state=0).fit(x, y).predict_proba(x).tobytes()


def torch() -> object:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(200):
        x = torch.randn(64 + step % 64, 256)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters())


print(sys.argv[1], hashlib.sha256(globals()[sys.argv[1]]()).hexdigest())
