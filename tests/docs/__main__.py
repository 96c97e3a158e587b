"""`python -m tests.docs`: write the generated pages of docs/reference again."""

from tests.docs.reference import REFERENCE, pages

if __name__ == "__main__":
    for name, text in pages().items():
        (REFERENCE / name).write_text(text, encoding="utf-8")
        print(f"wrote docs/reference/{name}")
