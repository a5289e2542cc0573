// Questions to begin with: two that drafts help by much, as measured, and one that is honest.

const LIGHTHOUSE = `The lighthouse stood at the end of the pier, where the wind never rested. Every evening the \
keeper climbed the hundred and twelve steps, lit the lamp, and wrote the weather into his book. \
he had done so for thirty yeers, and he knew each ships by the sound of its horn.

One night in January the fog was so thick that he could not see his own hands. He heard a horn that \
he did not know, far too close to the rocks. he ran down the steps, took the old brass bell from its \
hook, and rang it until the ship turned away.`;

export const PRESETS = [
  {
    name: "Correct a text",
    note: "The request says what the answer will mostly be (prediction), so most of it is drafted.",
    prompt: `Correct the mistakes in this text:\n\n${LIGHTHOUSE}`,
    fields: {
      prediction: { type: "content", content: LIGHTHOUSE },
      max_tokens: 200,
      temperature: 0,
    },
  },
  {
    name: "Fill a form",
    note: "A JSON schema leaves many tokens no choice, and those are drafted for nothing.",
    prompt:
      "Invent a person who works at a library: name, age, address and three hobbies. Answer in JSON.",
    fields: {
      max_tokens: 200,
      temperature: 0,
      response_format: {
        type: "json_schema",
        json_schema: {
          name: "person",
          strict: true,
          schema: {
            type: "object",
            additionalProperties: false,
            required: ["full_name", "age_in_years", "home_address", "favourite_hobbies"],
            properties: {
              full_name: { type: "string", maxLength: 40 },
              age_in_years: { type: "integer", minimum: 18, maximum: 99 },
              home_address: {
                type: "object",
                additionalProperties: false,
                required: ["street_and_number", "postal_code", "city_or_town"],
                properties: {
                  street_and_number: { type: "string", maxLength: 40 },
                  postal_code: { type: "string", maxLength: 10 },
                  city_or_town: { type: "string", maxLength: 30 },
                },
              },
              favourite_hobbies: {
                type: "array",
                minItems: 3,
                maxItems: 3,
                items: { type: "string", maxLength: 30 },
              },
            },
          },
        },
      },
    },
  },
  {
    name: "An open question",
    note: "Nothing here is known before it is written: small models guess, and gain little or nothing.",
    prompt: "How do vaccines work? Explain it to a ten-year-old.",
    fields: { max_tokens: 200, temperature: 0 },
  },
];
