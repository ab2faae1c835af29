"""Each field of the structs that most files see is written by one file: who reads it knows where to look.

A header and the C file of the same name count as one. What an initializer of the whole struct sets does not count, and
one file has such initializers.
"""

import re
from typing import NamedTuple

import pytest
from native_build import LAYERS, NATIVE

STRUCTS = ("engine", "channel", "operation")

INDEX = r"\[(?:[^\[\]]|\[[^\]]*\])*\]"
CHAIN = rf"(?<![\w.>])[a-z_]\w*(?:{INDEX})*(?:(?:->|\.)\w+(?:{INDEX})*)+"
ASSIGNS = r"(?:=(?!=)|[-+*/|&^%]=|<<=|>>=|\+\+|--)"
WRITES = (
    rf"(?=(?P<chain>{CHAIN})\s*{ASSIGNS})",  # without taking it: an index may have another one
    rf"(?:\+\+|--)(?P<chain>{CHAIN})",
    rf"\b(?:snprintf|strncpy|memcpy|memmove|memset)\((?P<chain>{CHAIN})",
)
ADDRESS = rf"&(?P<chain>{CHAIN})"  # to an atomic operation, or to what may write there


class Field(NamedTuple):
    struct: str
    name: str
    type: str
    inside: bool  # it lies in the struct, not behind a pointer
    is_array: bool


class Struct(NamedTuple):
    fields: dict[str, Field]
    home: str


def unit(file):
    return f"{file.parent.name}/{file.stem}"


def code(text):
    """The text with comments, strings and preprocessor lines made blank, and without what says nothing of a type."""
    blank = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^#(?:\\\n|[^\n])*', re.DOTALL | re.MULTILINE)
    text = blank.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    return re.sub(r"\b_Atomic\b|\bstatic\b|\bvolatile\b", "", text)


def sources():
    files = (file for layer in LAYERS.values() for folder in layer for file in sorted((NATIVE / folder).glob("*.[ch]")))
    return {file: code(file.read_text()) for file in files}


def fields(struct, body):
    for declaration in body.split(";"):
        if match := re.match(r"\s*(?:const\s+)?(?:struct\s+)?(\w+)\b(.*)", declaration, re.DOTALL):
            for declarator in match[2].split(","):
                if name := re.search(r"\w+", declarator):
                    yield Field(struct, name[0], match[1], "*" not in declarator, "[" in declarator)


def structs(texts):
    found = {}
    for file, text in texts.items():
        while match := re.search(r"\b(?:struct|union) (\w+) \{([^{}]*)\}", text):
            found[match[1]] = Struct({field.name: field for field in fields(match[1], match[2])}, unit(file))
            text = f"{text[: match.start()]}struct {match[1]}{text[match.end() :]}"
    return found


def declarations(text):
    """(position, name, struct) of each variable that is a struct or a pointer to one, in the order of the text."""
    for match in re.finditer(r"\b(?:struct (\w+)|(mlxdist_\w+))\b(?=([^;(){]*))", text):
        for declarator in match[3].split(","):
            name = re.match(r"[\s*]*(?:const\b)?[\s*]*(\w+)\s*(?:\[[^\]]*\])*\s*(?:=.*)?$", declarator, re.DOTALL)
            if not name:
                break
            yield match.start(), name[1], match[1] or match[2]


def resolve(chain, position, declared, known):
    """The fields of a chain such as `a->b[i].c`, as far as they are known; None: `a` is not declared here."""
    base, *names = re.findall(r"\w+", re.sub(INDEX, "", chain))
    types = [struct for at, name, struct in declared if name == base and at < position]
    if not types:
        return None
    struct, found = types[-1], []
    for name in names:
        if struct not in known or name not in known[struct].fields:
            break
        found.append(known[struct].fields[name])
        struct = found[-1].type
    return found


def may_write(match, text, last, known):
    """Whether the address of the field goes to what may write the field itself."""
    before = text[: match.start()]
    statement = before[max(map(before.rfind, ";{}")) + 1 :]
    call = re.search(r"\b(\w+)\([^();]*$", before)
    if call and (re.match("atomic_load|counted", call[1]) or re.search(rf"\b{call[1]}\((const [^,()]*,? *)+\)", text)):
        return False
    if re.match(r"\s*const\b[^=]*=", statement) or re.search(r"[=!]= $", before):
        return False
    has_own_file = last.type in known and known[last.type].home != known[last.struct].home
    is_element = match["chain"].endswith("]") or last.is_array
    return not (is_element or (last.inside and has_own_file) or last.type.startswith("pthread_"))


def writes(text, known):
    """The fields that the text writes; or the chain, where what it begins with is not declared there."""
    declared = list(declarations(text))
    for pattern in (*WRITES, ADDRESS):
        for match in re.finditer(pattern, text):
            chain = resolve(match["chain"], match.start("chain"), declared, known)
            if chain is None:
                yield match["chain"]
            if not chain or (pattern == ADDRESS and not may_write(match, text, chain[-1], known)):
                continue
            for field, outer in zip(chain[::-1], (*chain[-2::-1], None), strict=True):
                yield field
                if outer and not outer.inside:
                    break


@pytest.mark.parametrize(
    "statement",
    [
        "pair->first = 1;", "pair->first |= 1;", "pair->first++;", "if (x) --pair->first;", "pair->first <<= 2;",
        "x = pair->first = 1;", "list[pair->first++].y = 1;", "list[0].pair->first = 1;", "own.first -= 1;",
        "atomic_store(&pair->first, 1);", "count(&pair->first, 1);", "int *alias = &pair->first;",
        "struct pair *other = x, *more = y; more->first = 1;", "memset(pair->first, 0, 4);", "pair->first.part.y = 1;",
    ],
)  # fmt: skip
def test_every_form_of_a_write_is_seen(statement):
    text = "struct part { int y; }; struct inner { struct part part; }; struct pair { struct inner first; int z; };\n"
    text += "struct list { struct pair *pair; };\n"
    text += f"void f(struct pair *pair, int x, struct list *list) {{ struct pair own; {statement} }}\n"
    known = structs({NATIVE / "pair.h": text})
    found = {(field.struct, field.name) for field in writes(text, known)}
    assert ("pair", "first") in found and ("pair", "z") not in found and ("list", "pair") not in found


def test_each_field_has_one_writer():
    texts = sources()
    known = structs(texts)
    writers = {(struct, name): set() for struct in STRUCTS for name in known[struct].fields}
    names, unknown = {name for _, name in writers}, []
    for file, text in texts.items():
        for written in writes(text, known):
            if isinstance(written, Field):
                if written.struct in STRUCTS:
                    writers[written.struct, written.name].add(unit(file))
            elif match := re.match(r"\w+->(\w+)$", written):
                unknown += [f"{file.name}: {written}"] if match[1] in names else []
    assert unknown == []
    assert writers["channel", "sent"] == {"transport/channel"}
    assert writers["operation", "current"] == {"engine/transfer"}
    several = [f"{struct}.{name}: {sorted(files)}" for (struct, name), files in writers.items() if len(files) > 1]
    assert several == []


@pytest.mark.parametrize("struct", STRUCTS)
def test_one_file_initializes_the_whole_struct(struct):
    files = {unit(file) for file, text in sources().items() if f"(struct {struct}){{" in text}
    assert len(files) <= 1
