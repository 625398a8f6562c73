"""RunPod's own schemas of REST v2, from its OpenAPI file, to judge the fake's answers by."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema

from tests.tidy.sources import ROOT

SCHEMAS = json.loads((ROOT / "tests/provisioner/runpod_v2_schemas.json").read_text())
PROBLEM = "application/problem+json"


def conforms(answer: httpx.Response, schema: str, *, status: int = 200) -> Any:
    """Return the answer's document if the vendor's schema takes it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == (PROBLEM if schema == "ErrorResponse" else "application/json")
    document = answer.json()
    wanted = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$ref": f"#/components/schemas/{schema}",
        **SCHEMAS,
    }
    jsonschema.Draft202012Validator(wanted).validate(document)
    return document
