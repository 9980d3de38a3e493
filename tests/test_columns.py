"""Columns: rows, tables, pages and help texts from one declaration."""

from types import SimpleNamespace

from hookscope.columns import Column, Columns
from hookscope.hooks import CALL, MODEL, Call

PETS = Columns(
    "name",
    Column("legs", lambda pet: 2 * pet.pairs, "how many legs it stands on", need=2, hide="zero"),
    Column("size", hide="unknown", help="in metres"),
    Column("breed", hide="same"),
    Column("kind", hide="same"),
    Column("history", where="nested"),
    Column("note", where="wide"),
    Column("weights", where="rows"),
    Column("bar", where="table"),
)
CAT = SimpleNamespace(name="cat", pairs=2, size=0.4, breed="tabby", kind="mammal", history=[1], note="")


def test_each_format_has_its_columns() -> None:
    assert PETS.flat == ("name", "legs", "size", "breed", "kind", "note", "weights")
    assert PETS.nested == (*PETS.flat, "history")
    assert PETS.table == ("name", "legs", "size", "breed", "kind", "bar")
    assert PETS.page == ("name", "legs", "size", "breed", "kind", "note")


def test_a_value_comes_from_the_call_then_from_the_column_then_from_the_first_fact_that_has_it() -> None:
    row = PETS.row(CAT, SimpleNamespace(name="other", weights="random"), size=1.0)
    own = {"name": "cat", "legs": 4, "breed": "tabby", "kind": "mammal", "history": [1], "note": ""}
    assert row == own | {"size": 1.0, "weights": "random"}
    assert list(row) == [column.name for column in PETS if column.where != "table"]
    assert PETS.rows([CAT], weights="none")[0]["weights"] == "none"
    assert Columns("absent").row(CAT) == {"absent": None}


def test_a_value_may_need_all_facts() -> None:
    share = Column("share", over=lambda pets: [pet.pairs / sum(other.pairs for other in pets) for pet in pets])
    rows = Columns("name", share).rows([CAT, SimpleNamespace(name="crab", pairs=6)])
    assert rows == [{"name": "cat", "share": 0.25}, {"name": "crab", "share": 0.75}]


def shown(**values: list[object]) -> list[str]:
    """The columns of a table of pets with these values."""
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return [column.name for column in PETS.shown(rows)]


def test_a_table_leaves_out_what_says_nothing() -> None:
    assert shown(name=["a", "b"], legs=[0, 0], size=[None, None]) == ["name", "bar"]
    assert shown(name=["a", "b"], legs=[0, 2], size=[None, 0.0]) == ["name", "legs", "size", "bar"]
    assert shown(breed=["x", "x"], kind=["x", "x"]) == ["name", "bar"]
    assert shown(breed=["x", "x"], kind=["y", "y"]) == ["name", "breed", "kind", "bar"]  # what is alike may differ


def test_the_order_is_shown_where_a_call_has_no_index() -> None:
    rows = [{"index": 0, "order": 0, "name": "a"}, {"index": 1, "order": 4, "name": "b"}]
    assert [column.name for column in CALL.shown(rows)] == ["index", "name", "type"]
    rows[1]["index"] = None
    assert [column.name for column in CALL.shown(rows)] == ["index", "name", "type", "order"]


def test_a_row_names_its_call_and_the_model_itself() -> None:
    call = Call("", "Sequential", 0, None, 7)
    named = {"index": None, "name": MODEL, "type": "Sequential", "call": 0, "order": 7}
    assert CALL.row(call) == CALL.row(SimpleNamespace(call=call)) == named


def test_columns_can_be_left_out_and_changed() -> None:
    changed = PETS.but("size", "breed", legs={"need": 9})
    assert changed.flat == ("name", "legs", "kind", "note", "weights")
    assert next(column.need for column in changed if column.name == "legs") == 9
    assert next(column.need for column in PETS if column.name == "legs") == 2


def test_the_help_lists_what_each_column_says() -> None:
    assert PETS.help_lines() == ["legs  how many legs it stands on", "size  in metres"]
    assert PETS.help_lines(22) == ["legs  how many legs it", "      stands on", "size  in metres"]


def test_a_table_of_random_weights_has_no_probability() -> None:
    columns = Columns("label", Column("probability", hide="random"), Column("weights", where="rows"))
    row = {"label": "cat", "probability": 0.9, "weights": "random (seed 0)"}
    assert [column.name for column in columns.shown([row])] == ["label"]
    for other in ("random.pth", "model.pth"):  # a file may be called so
        assert len(columns.shown([row, row | {"weights": other}])) == 2
    assert len(columns.shown([row | {"weights": "model.pth", "probability": None}])) == 1
