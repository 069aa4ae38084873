"""Checks of options that several commands share."""

LARGEST_MEMORY = 100_000  # coefficients or points: what takes minutes and more memory than there is


def check_range(least: int, most: float = float("inf"), **options: float | None) -> None:
    """Refuse numbers outside of a range by the name of their option; None was not given."""
    for name, value in options.items():
        if value is not None and not least <= value <= most:
            bounds = f"{least:,} or more" if most == float("inf") else f"{least:,} to {most:,}"
            raise ValueError(f"--{name.replace('_', '-')} {value}: give {bounds}")
