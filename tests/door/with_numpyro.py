"""numpyro as its pages show it: a posterior by NUTS, chains side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS


def model(x, y):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    shift = numpyro.sample("shift", dist.Normal(0, 1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(slope * x + shift, noise), obs=y)


x = jnp.linspace(-1, 1, 32)
y = 2 * x + 0.5 + 0.1 * jax.random.normal(jax.random.key(0), x.shape)
for method in ("vectorized", "parallel"):
    chains = MCMC(
        NUTS(model),
        num_warmup=50,
        num_samples=50,
        num_chains=2,
        chain_method=method,
        progress_bar=False,
    )
    chains.run(jax.random.key(1), x, y)
    for name, found in sorted(chains.get_samples().items()):
        print(method, name, found.shape, np.asarray(found).tobytes().hex())
