"""Tables for the terminal and as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich import table as rich_table
from rich.markup import escape


@dataclass(frozen=True)
class Table:
    """Rows of text under named columns; `note` explains how to read them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def rich(self) -> rich_table.Table:
        """For a terminal: the first column is text, the others are numbers."""
        # brackets are text, not rich markup
        title, note = escape(self.title), escape(self.note)
        shown = rich_table.Table(title=title, caption=note, box=box.SIMPLE_HEAD, title_justify="left")
        shown.caption_justify, shown.show_header = "left", any(self.columns)
        for index, column in enumerate(self.columns):
            shown.add_column(escape(column), justify="right" if index else "left")
        for row in self.rows:
            shown.add_row(*map(escape, row))
        return shown

    def text(self, width: int) -> rich_table.Table:
        """For a terminal of `width` characters: columns break between words; too many stand one below the other."""
        columns = zip(self.columns, *self.rows, strict=True)
        longest = [max(len(word) for cell in column for word in (cell.split() or [""])) for column in columns]
        if sum(longest) + 2 * len(longest) < width:
            shown = self.rich()
            for column, least in zip(shown.columns, longest, strict=True):
                column.min_width = least
            return shown
        shown = rich_table.Table(title=escape(self.title), caption=escape(self.note), box=None, show_header=False)
        shown.title_justify = shown.caption_justify = "left"
        for row in self.rows:
            shown.add_row(escape(row[0]), "", style="bold")
            for name, cell in zip(self.columns[1:], row[1:], strict=True):
                shown.add_row(f"  {escape(name)}", escape(cell))
        return shown

    def markdown(self) -> str:
        """For a page."""
        rule = ["---"] + ["---:"] * (len(self.columns) - 1)
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.columns, rule, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines, "", self.note]).rstrip() + "\n"


def number(value: float) -> str:
    """Three digits; small numbers with an exponent."""
    return f"{value:.3f}" if value >= 0.01 else f"{value:.2e}".replace("e-0", "e-")
