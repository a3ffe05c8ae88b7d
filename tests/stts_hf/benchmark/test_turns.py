"""Variants take turns, each begins a round, and one that failed is left out."""

from stts_hf.benchmark.turns import take_turns


def test_variants_take_turns_and_each_begins_a_round():
    variants = [{"name": name, "status": "ok"} for name in ("stock", "0", "0.5")]
    calls: list[str] = []

    def run(variant):
        calls.append(variant["name"])
        if calls.count("0") == 3:
            variants[1]["status"] = "out of memory"

    order = take_turns("title", variants, 4, lambda variant: calls.append(f"warm-up {variant['name']}"), run)
    assert calls[:3] == ["warm-up stock", "warm-up 0", "warm-up 0.5"]
    assert calls[3:] == [name for names in order for name in names]
    assert order == [["stock", "0", "0.5"], ["0", "0.5", "stock"], ["0.5", "stock", "0"], ["0.5", "stock"]]
