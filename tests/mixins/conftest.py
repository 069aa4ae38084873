MARKS = (
    "accelerate_tests", "flash_attn_test", "flash_attn_3_test", "flash_attn_4_test", "generate", "is_training_test",
    "torch_compile_test",
)  # fmt: skip


def pytest_configure(config):
    for mark in MARKS:
        config.addinivalue_line("markers", f"{mark}: of transformers' own tests")
