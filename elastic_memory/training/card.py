"""The model card: what the model is, how it was trained, how to use it."""

from pathlib import Path
from typing import Any

import yaml

from elastic_memory.model.attach import SAVED
from elastic_memory.training.recipe import Recipe


def model_card(recipe: Recipe, result: dict[str, Any], network: Any, source: dict[str, Any]) -> str:
    """Markdown for the README.md beside the weights; `source` is what the manifest of the rows says of their text."""
    config, where = network.config, ", ".join(str(layer["layer"]) for layer in network.memory_report())
    attached = getattr(config, SAVED, None)
    memory = attached["memory"] if attached else config.memory
    load = 'AutoModelForCausalLM.from_pretrained("path/to/this/folder")'
    front = yaml.safe_dump({"library_name": "transformers", "tags": ["elastic-memory", memory]})
    figures = {
        "parameters": f"{result['parameters']:,}",
        "tokens": f"{result['tokens']:,} in {result['steps']:,} steps",
        "final training loss": f"{result['final_loss']:.4f} (mean of the last hundredth of the run)",
        "steps not applied / restarts": f"{result['skipped']} / {len(result['restarts'])}",
        "speed": f"{result['tokens_per_second']:,.0f} tokens/s on {result['machine']['device']}",
        "memory": f"`{memory}` in layers {where}" if where else "none",
        "numbers carried from block to block": f"{sum(it['carried_floats'] for it in network.memory_report()):,}",
        "data": f"{', '.join(source['names'])} ({', '.join(source['licences'])})",
        "hashes": f"rows {result['data'][:16]}, tokenizer {str(result['tokenizer'])[:16]}",
        "order of samples": result["sample_order"],
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in figures.items())
    return f"""---
{front}---

# {recipe.name}

{_origin(recipe, config)} with the memory `{memory}`, trained by `elastic train`.

```python
import elastic_memory as em
from transformers import AutoModelForCausalLM

model = {f"em.attach_memory({load})" if attached else load}
```

```sh
elastic generate path/to/this/folder --prompt "Once"
elastic evaluate path/to/this/folder --data ROWS    # a folder written by elastic prepare
```

| | |
|---|---|
{table}

{_purpose(recipe)}

## Recipe

```yaml
{yaml.safe_dump(recipe.to_dict(), sort_keys=False)}```
"""


def _origin(recipe: Recipe, config: Any) -> str:
    if recipe.start is None:
        return "A Llama decoder"
    return f"A model of the family {config.model_type}, fine-tuned from `{Path(recipe.start.path).name}`,"


def _purpose(recipe: Recipe) -> str:
    if recipe.start is None:
        return "Trained from scratch for research; it was not tuned to follow instructions or to refuse."
    how = "low-rank adapters, merged into the weights" if recipe.training.lora else "all weights"
    return f"Fine-tuned for research ({how}); the licence and the limits of the original model hold."
