"""The model card: what the model is, how it was trained, how to use it."""

from typing import Any

import yaml

from elastic_memory.training.recipe import Recipe


def model_card(recipe: Recipe, result: dict[str, Any]) -> str:
    """Markdown for the README.md beside the weights."""
    front = yaml.safe_dump({"library_name": "transformers", "tags": ["elastic-memory", recipe.model.memory]})
    figures = {
        "parameters": f"{result['parameters']:,}",
        "tokens": f"{result['tokens']:,} in {result['steps']:,} steps",
        "final training loss": f"{result['final_loss']:.4f} (mean of the last hundredth of the run)",
        "steps not applied / restarts": f"{result['skipped']} / {len(result['restarts'])}",
        "speed": f"{result['tokens_per_second']:,.0f} tokens/s on {result['machine']['device']}",
        "data": f"SHA-256 {result['data'][:16]}, tokenizer {str(result['tokenizer'])[:16]}",
        "order of samples": result["sample_order"],
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in figures.items())
    return f"""---
{front}---

# {recipe.name}

A Llama decoder with the memory `{recipe.model.memory}`, trained by `elastic train`.

```python
import elastic_memory
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
```

| | |
|---|---|
{table}

Trained from scratch for research; it was not tuned to follow instructions or to refuse.

## Recipe

```yaml
{yaml.safe_dump(recipe.to_dict(), sort_keys=False)}```
"""
