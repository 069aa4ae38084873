"""Preparation the slow, obvious way: every document tokenised whole, one after another."""


def rows(documents, encode, length):
    """[(document name, row of ids)] of all documents longer than `length`, in order, tails dropped."""
    found = []
    for name, text in documents:
        ids = encode(text)
        if len(ids) > length:
            found += [(name, list(ids[at : at + length])) for at in range(0, len(ids) - length + 1, length)]
    return found
