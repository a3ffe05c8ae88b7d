"""How a share is written."""


def percent(share: float) -> str:
    """Such as "50%" of 0.5, and "0.4%" of 0.004, which is not "0%"."""
    return f"{100 * share:g}%"
