"""From a recipe to a trained model: `train(load_recipe("recipes/smoke/elastic.yaml"), data, out)`.

`session` makes attempts until the last step is done; `trainer` is transformers' Trainer, made certain of what `order`,
`spikes` and `checkpoints` say.
"""

from elastic_memory.training.recipe import Recipe, load_recipe, variants
from elastic_memory.training.session import Resume, train

__all__ = ["Recipe", "Resume", "load_recipe", "train", "variants"]
