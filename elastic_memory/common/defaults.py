"""Values that several files need, stated once: those of the paper, of LongPPL's release and of RULER, and our own."""

LENGTH = 32_768  # tokens of a sample
BLOCK_SIZE = 2_048  # tokens of a block
ORDER, POINTS = 540, 512  # coefficients of a memory at 1x, and its sample points

LONGPPL_REFERENCE = "meta-llama/Llama-3.1-8B"  # the model that finds key tokens
TRUNC_LEN, SLIDING_WINDOW = 4_096, 1_024  # its short context, and how far that moves at a time
ALPHA, BETA = 2.0, -2.0  # the least gain and the least log-probability of a key token

RULER_LENGTHS = (4_096, 8_192)  # tokens of a prompt

SHARES = (0.9, 0.05, 0.05)  # of the documents of a corpus without splits, for train, validation and test
RECALL_STEPS = 600  # of training on a recall task before a model is asked
MEMORY_SUFFIX = ".memory.safetensors"  # of memory files
