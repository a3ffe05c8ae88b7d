"""The paper's two throughput tables (supplement, "Detailed Throughput Tables"), 8 H100, Molmo2-4B."""

# (mode, frames in a batch, pruning ratio): speed-up over the same system without pruning
SPEED_UPS = {
    ("training", 128, 0.3): 1.28,
    ("training", 128, 0.4): 1.44,
    ("training", 128, 0.5): 1.62,
    ("training", 256, 0.3): 1.48,
    ("training", 256, 0.4): 1.88,
    ("training", 256, 0.5): 2.25,
    ("inference", 128, 0.3): 1.14,
    ("inference", 128, 0.4): 1.30,
    ("inference", 128, 0.5): 1.61,
    ("inference", 256, 0.3): 1.45,
    ("inference", 256, 0.4): 1.71,
    ("inference", 256, 0.5): 2.22,
}
# (frames in a batch, pruning ratio): "Toks/Inst."
TOKENS_PER_INSTANCE = {
    (128, 0.0): 15670,
    (128, 0.3): 12560,
    (128, 0.4): 11524,
    (128, 0.5): 10486,
    (256, 0.0): 25307,
    (256, 0.3): 19087,
    (256, 0.4): 17013,
    (256, 0.5): 14939,
}
# Batches per second without pruning.
THROUGHPUT_WITHOUT_PRUNING = {
    ("training", 128): 0.1932,
    ("training", 256): 0.0549,
    ("inference", 128): 1.0186,
    ("inference", 256): 0.2641,
}
