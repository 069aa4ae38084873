"""transformers' own Trainer, for users who bring padded rows: what it counts, and what the loss sums."""

import pytest
import torch
from transformers import Trainer, TrainingArguments

import elastic_memory as em


@pytest.mark.parametrize(("first_label_masked", "counted"), [(True, 11 + 7), (False, 11 + 8)])
def test_rows_padded_on_the_left_count_one_label_too_many_unless_it_is_masked(tmp_path, first_label_masked, counted):
    model = em.MemoryLlamaForCausalLM(em.MemoryLlamaConfig.preset("tiny", block_size=4))
    ids, mask = torch.randint(0, 512, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    labels = ids.masked_fill(mask == 0, -100)
    if first_label_masked:
        labels[1, 4] = -100
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    _, items = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
    assert items == counted
    trained = model(**batch, num_items_in_batch=items).loss
    torch.testing.assert_close(trained, model(**batch).loss * (11 + 7) / counted)
