"""The census log's folds: five seeds test on every row once, and rows that are alike stay together."""

from pathlib import Path

from benchmarks.logs import TEST, adult

ROW = "{age}, Private, {weight}, HS-grad, 9, Never-married, Sales, Own-child, White, Male, 0, 0, 40, Peru, {label}"


def test_five_seeds_test_on_every_row_once(tmp_path):
    rows = [ROW.format(age=17 + i // 2, weight=1000 + i, label="<=50K" if i % 2 else ">50K") for i in range(120)]
    source = tmp_path / "adult.data"
    source.write_text("\n".join(rows) + "\n\n")
    held_out = []
    for seed in range(1, 11):
        settings = adult(source, str(tmp_path), seed)
        path = next(s.removeprefix("data.path=") for s in settings if s.startswith("data.path="))
        days = [int(line.rsplit(", ", 1)[1]) for line in Path(path).read_text().splitlines()]
        assert days[::2] == days[1::2], "rows alike but for weight and label are on different sides"
        held_out.append([day == TEST for day in days])
    for partition in (held_out[:5], held_out[5:]):
        assert [sum(column) for column in zip(*partition, strict=True)] == [1] * len(rows)
    assert held_out[0] != held_out[5]
