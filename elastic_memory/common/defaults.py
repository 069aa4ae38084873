"""Numbers that the paper and LongPPL's release fix, stated once: defaults elsewhere come from here."""

LENGTH = 32_768  # tokens of a sample
BLOCK_SIZE = 2_048  # tokens of a block

LONGPPL_REFERENCE = "meta-llama/Llama-3.1-8B"  # the model that finds key tokens
TRUNC_LEN, SLIDING_WINDOW = 4_096, 1_024  # its short context, and how far that moves at a time
ALPHA, BETA = 2.0, -2.0  # the least gain and the least log-probability of a key token
