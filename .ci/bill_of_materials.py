"""What a wheel contains and needs, as a CycloneDX 1.6 document beside it (WHEEL with .cdx.json).

    python .ci/bill_of_materials.py dist/embedlm-*.whl

The files with their SHA-256, the Python packages that its metadata asks for, those of an extra
marked so, and the system's libraries that the native module is linked with. Which release of a
package is installed is not a property of the wheel: `cyclonedx-py environment` lists those.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import native_file
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement

NATIVE = "sdk/kernels/cpu/_native."
#: The names of CycloneDX's own taxonomy for Python packages.
EXTRA = "cdx:python:package:required-extra"


def package(metadata: Message) -> Component:
    """The wheel's package itself."""
    name, version = metadata["Name"], metadata["Version"]
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        description=metadata["Summary"],
        licenses=[LicenseFactory().make_from_string(metadata["License-Expression"])],
        purl=PackageURL("pypi", name=name, version=version),
        bom_ref=name,
    )


def required(metadata: Message) -> list[Component]:
    """One component for each package that is asked for, without a version: a range is not one."""
    found: dict[str, Component] = {}
    for text in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(text)
        extra = re.search(r"extra == ['\"]([^'\"]+)", str(requirement.marker or ""))
        name = requirement.name.lower()
        component = found.setdefault(
            name,
            Component(
                name=name,
                type=ComponentType.LIBRARY,
                scope=ComponentScope.OPTIONAL,
                purl=PackageURL("pypi", name=name),
                bom_ref=f"pypi:{name}",
            ),
        )
        if extra:
            component.properties.add(Property(name=EXTRA, value=extra[1]))
        else:
            component.scope = ComponentScope.REQUIRED
        component.properties.add(Property(name="embedlm:requirement", value=text))
    return list(found.values())


def system_libraries(native: bytes) -> list[Component]:
    """What the dynamic linker loads with the native module; not in the wheel."""
    return [
        Component(
            name=name,
            type=ComponentType.LIBRARY,
            scope=ComponentScope.REQUIRED,
            bom_ref=f"system:{name}",
        )
        for name in native_file.read(native).libraries
    ]


def contents(wheel: zipfile.ZipFile) -> list[Component]:
    """Every file of the wheel but RECORD, which lists the same hashes."""
    return [
        Component(
            name=name,
            type=ComponentType.FILE,
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest(wheel.read(name)))],
            bom_ref=f"file:{name}",
        )
        for name in sorted(wheel.namelist())
        if not name.endswith((".dist-info/RECORD", "/"))
    ]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def bill(path: Path) -> str:
    """The document of one wheel, valid by CycloneDX's own schema."""
    with zipfile.ZipFile(path) as wheel:
        [name] = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(wheel.read(name).decode())
        root = package(metadata)
        root.hashes.add(HashType(alg=HashAlgorithm.SHA_256, content=digest(path.read_bytes())))
        root.components.update(contents(wheel))
        [native] = [name for name in wheel.namelist() if name.startswith(NATIVE)]
        needs = [*required(metadata), *system_libraries(wheel.read(native))]
    bom = Bom(components=needs)
    bom.metadata.component = root
    bom.register_dependency(root, needs)
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if wrong:
        raise SystemExit(f"bill_of_materials: not valid CycloneDX: {wrong}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    for wheel in parser.parse_args().wheels:
        wheel.with_suffix(".cdx.json").write_text(bill(wheel) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
