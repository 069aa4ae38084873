"""Checks of options that several commands share."""

LARGEST_MEMORY = 100_000  # coefficients or points: what takes minutes and more memory than there is


def check_range(least: int, most: float = float("inf"), **options: float | list[int] | None) -> None:
    """Refuse numbers outside a range by the name of their option; None means that an option was not given."""
    for name, given in options.items():
        for value in given if isinstance(given, list) else [given]:
            if value is not None and not least <= value <= most:
                bounds = f"{least:,} or more" if most == float("inf") else f"{least:,} to {most:,}"
                raise ValueError(f"--{name.replace('_', '-')} {value}: give {bounds}")
