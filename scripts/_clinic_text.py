"""The sentences of the embedded clinic notes, all written for dpllm.

In: nothing. Out: sentence frames, and the lists that fill them, for `build_builtin_data.py`. Names,
numbers, streets and employers are not here: Faker draws them once for each patient.

Bound for each patient: first last title name mrn phone dob age job employer street city med dose
condition allergy kin kinname pet habit habit2 he his him gp sign. Everything else is a list below.
"""

from __future__ import annotations

# Ways in which a note names its patient.
WHO = [
    "{title} {last}",
    "{first} {last}",
    "{title} {first} {last}",
    "{last}, {first}",
    "{first} {last}, {age}",
    "{first} {last} (MRN {mrn})",
    "{title} {last} of {street}",
    "Pt {last}, MRN {mrn}",
]

# (beginning of a note, kind of visit that it shows)
OPENERS = [
    ("{who} seen {when} with {complaint} for {spell}[, {worse}].", "clinic"),
    ("{who} rang about {complaint}[, {worse}]; call back on {phone}.", "phone"),
    ("{who} in {when}: {complaint}, {spell}, {worse}.", "clinic"),
    ("{who} presents with {complaint}[ since {event}].", "clinic"),
    ("Review of {who}: {condition} {course}[ on {med} {dose}].", "review"),
    ("{who} came without an appointment, {complaint} since {event}.", "urgent"),
    ("Home visit to {title} {last} at {street}, {city}: {complaint}.", "home"),
    ("{when_cap}, {who} again for {complaint}[; {course}].", "review"),
    ("F/u {who}, {condition} {course}.", "review"),
    ("{who} walked out of work at {employer} with {complaint}.", "urgent"),
    ("Phone consult, {who}, {phone}: {complaint} {spell}[, {worse}].", "phone"),
    ("{title} {last}, {job}, complains of {complaint}[, {worse}].", "clinic"),
    ("{kin_cap} {kinname} brought {who} because of {complaint}.", "urgent"),
    ("New script for {who}: {med} {dose}[ for {condition}].", "paperwork"),
    ("{who} missed {his} slot {when}, says {excuse}.", "paperwork"),
    ("Bloods back for {who}: {result}.", "paperwork"),
    ("{who} discharged {when} after {complaint}; {condition} {course}.", "paperwork"),
    ("Annual check, {who}, DOB {dob}: {vital}[, {vital2}].", "review"),
    ("Out of hours: {who} called from {phone}, {complaint}.", "phone"),
    ("{who} wants a letter for {employer} about {condition}.", "paperwork"),
    ("{who} {when}. C/o {complaint}, {spell}.", "clinic"),
    ("Saw {who} at {hour} {when}, {complaint}, {vital}.", "clinic"),
    ("{who} transferred from {city}; known {condition}, {med} {dose}.", "paperwork"),
    ("Repeat visit, {who}: {complaint} no better on {med}.", "review"),
    ("{who} asked me not to tell {kin} {kinname} about {condition}.", "clinic"),
    ("Urgent slot given to {who}, {complaint} since {event}.", "urgent"),
]

FOLLOW_UPS = [
    "{he_cap} {habit}.",
    "Admits {he} {habit}.",
    "Still {habit_ing}.",
    "{he_cap} {habit} and {habit2}.",
    "Takes {med} {dose}, {adherence}.",
    "Known {condition}, {course}.",
    "Allergic to {allergy}.",
    "Works as a(n) {job} at {employer}.",
    "Lives at {street}, {city}[ with {kin} {kinname}].",
    "{kin_cap} {kinname} {kin_news}.",
    "Best reached on {phone}[, {phone_note}].",
    "O/e {vital}, {vital2}.",
    "{vital_cap}.",
    "Lost {his} job at {employer} {when}[, money is tight].",
    "Worried since {event}.",
    "Did not mention that {he} {habit}.",
    "Increased {med} to {dose}.",
    "Stopped {med} because of {side_effect}.",
    "{pet_cap} {pet_news}.",
    "Denies {denied}, though {kin} {kinname} says otherwise.",
    "Moved to {street}, {city} {when}.",
    "Wants results sent to {phone} only.",
    "{plan}.",
    "Plan: {plan}[, then {plan2}].",
    "Gets {side_effect} from {med}.",
    "New number {phone}.",
    "Boss at {employer} must not know.",
    "Cried when {kinname} came up.",
]

# Each clinician has a few endings.
SIGN_OFFS = [
    "Told {him} to walk more, again.",
    "Running late, typed on my phone.",
    "Nice hands, cold feet.",
    "Would not bet on it.",
    "Sings in the corridor.",
    "Watch this one.",
    "Gut says viral.",
    "Half the story, as ever.",
    "Coffee first, then forms.",
    "No drama.",
    "Happy to see {him} sooner.",
    "Handwriting better than mine.",
    "Chair squeaked throughout.",
    "Laughs at own jokes.",
    "Sensible plan, sensible shoes.",
    "Rain on the skylight, hard to hear the chest.",
    "Promised to cut down, we shall see.",
    "Owes me a jar of chutney.",
    "Brought biscuits.",
    "Tick, tick, done.",
    "Query query query.",
    "Ask about the boat next time.",
    "Grumpy but fair.",
    "Long talk, short list.",
]

# (the clinician's wording, the wording after "still")
HABITS = [
    ("smokes ten a day behind the garage", "smoking behind the garage"),
    ("drinks a bottle of wine most nights", "drinking most nights"),
    ("keeps {his} pills in a biscuit tin", "keeping pills in a biscuit tin"),
    ("naps in the van at lunch", "napping in the van"),
    ("skips breakfast and eats at midnight", "eating at midnight"),
    ("bites {his} nails down to the quick", "biting {his} nails"),
    ("plays the slots on Fridays", "playing the slots"),
    ("vapes in the shower", "vaping in the shower"),
    ("lives on energy drinks", "living on energy drinks"),
    ("sleeps in a recliner by the TV", "sleeping in the recliner"),
    ("hides chocolate in the piano stool", "hiding chocolate"),
    ("runs before dawn whatever the knee says", "running before dawn"),
    ("chews tobacco on long drives", "chewing tobacco"),
    ("shares sleeping tablets with a neighbour", "sharing sleeping tablets"),
    ("weighs {himself} four times a day", "weighing {himself} all day"),
    ("cracks {his} knuckles all through prayers", "cracking {his} knuckles"),
    ("swims in the quarry in all weathers", "swimming in the quarry"),
    ("keeps a diary of every headache", "keeping the headache diary"),
    ("takes {his} insulin in the parked car", "injecting in the parked car"),
    ("gambles online after the kids are down", "gambling online"),
    ("picks at the scar when anxious", "picking at the scar"),
    ("eats ice straight from the tray", "eating ice"),
    ("talks to {his} late mother at supper", "talking to {his} late mother"),
    ("lifts weights in the unheated barn", "lifting in the barn"),
    ("salts everything, even melon", "salting everything"),
    ("drives without {his} glasses", "driving without glasses"),
    ("counts stairs out loud", "counting stairs"),
    ("buys diet tea off the internet", "buying diet tea"),
    ("doubles the dose on bad days", "doubling the dose"),
    ("grinds {his} teeth in traffic", "grinding {his} teeth"),
    ("works nights and dozes at red lights", "dozing at red lights"),
    ("hoards old prescriptions", "hoarding prescriptions"),
    ("fasts on Wednesdays", "fasting midweek"),
    ("smokes cannabis for the spasms", "using cannabis for spasms"),
    ("texts through every consultation", "texting throughout"),
    ("stores cigars in the freezer", "storing cigars"),
]

CONDITIONS = """asthma; type 2 diabetes; migraine; gout; eczema; high blood pressure;
depression; epilepsy; psoriasis; hypothyroidism; reflux; sleep apnoea; angina; arthritis;
anaemia; panic attacks; hepatitis C; HIV; endometriosis; sciatica; atrial fibrillation; bipolar
disorder; COPD; coeliac disease; kidney stones; glaucoma; alcohol dependence; tinnitus; chronic
fatigue; lupus"""
MEDICINES = """metformin, 500 mg bd; lisinopril, 10 mg daily; sertraline, 50 mg daily;
salbutamol, 2 puffs prn; atorvastatin, 40 mg at night; omeprazole, 20 mg daily; levothyroxine,
75 mcg daily; ramipril, 5 mg daily; allopurinol, 300 mg daily; gabapentin, 300 mg tds;
amlodipine, 10 mg daily; citalopram, 20 mg daily; warfarin, 3 mg daily; prednisolone, 15 mg
daily; methotrexate, 15 mg weekly; lithium, 400 mg at night; naproxen, 250 mg bd; propranolol,
40 mg tds; tramadol, 100 mg bd; mirtazapine, 30 mg at night; insulin glargine, 12 units nocte;
bisoprolol, half a tablet daily; furosemide, 40 mg daily"""
ALLERGIES = """penicillin; latex; codeine; shellfish; peanuts; sulfa; ibuprofen; bee stings;
eggs; iodine; sticking plaster; morphine"""
PETS = "the greyhound; {his} parrot; the old cat; {his} terrier; the tortoise; {his} lame pony"

# Relatives of a man and of a woman, each with a sex, since a name is drawn to match.
KIN = {
    "m": """wife f; husband m; mother f; brother m; son m; daughter f; ex-wife f; stepson m;
grandmother f; uncle m""",
    "f": """husband m; wife f; father m; sister f; son m; daughter f; ex-husband m; aunt f;
nephew m; niece f""",
}

LISTS: dict[str, str] = {
    "complaint": """chest pain; a dry cough; low back pain; dizziness; a rash on both arms; poor
sleep; palpitations; stomach cramps; numb fingers; a swollen ankle; night sweats; blurred
vision; heartburn; weight loss; a stiff neck; ringing ears; headaches; burning urine; low mood;
breathlessness; a sore throat; knee pain; nosebleeds; shaking hands; bleeding gums; hair loss;
earache; a lump in the groin; hot flushes; vomiting; constipation; a racing heart; cramp in the
calves; itchy eyes; fainting""",
    "spell": """three days; 2 weeks; ten days; a month; since Sunday; on and off; 5 days; most
of June; six weeks; 48 hours; years really; about 9 days; all winter; 3 nights running""",
    "worse": """worse at night; worse on stairs; better lying down; worse after meals; not
sleeping; worse with coughing; better with heat; worse at work; comes in waves; worse in the
cold; keeps {him} up; no fever; off {his} food""",
    "when": """today; this morning; yesterday; on {date}; on {date}; on {date}; last night;
after lunch; late on {date}""",
    "event": """the divorce; {his} fall; the funeral; {date}; {date}; the night shift started;
the crash; {kinname} left; starting {med}; the redundancy; {kinname} died; the move to {city};
the holiday; the miscarriage; the court date""",
    "course": """stable; worse; well controlled; badly controlled; improving; no change; flaring
up; in remission; out of control; slowly settling; as before""",
    "adherence": """forgets weekends; never misses; stops when better; not keen; ran out {date};
half doses really; hates the taste; says it helps; crushes it in jam""",
    "side_effect": """nausea; a dry mouth; swollen feet; vivid dreams; dizziness; a metallic
taste; weight gain; the shakes; tiredness; itching""",
    "denied": "drinking; smoking; self-harm; using; skipping doses; falls; gambling; purging",
    "excuse": """the bus broke down; {pet} was ill; {he} overslept; {kin} {kinname} took the
car; {he} forgot; {employer} would not release {him}; {he} was in jail; work ran over""",
    "result": """HbA1c {n2}; Hb {n2}, ferritin low; TSH raised; cholesterol {n1}.{d}; normal;
CRP {n2}; potassium {n1}.{d}; positive, {kinname} not told; INR {n1}.{d}; lithium level high""",
    "vital": """BP 1{n2}/{n2}; pulse {n2}; sats 9{d}; temp 3{n1}.{d}; weight {n2} kg; chest
clear; peak flow {n3}; BP 1{n2}/{n2}, pulse {n2}; abdomen soft; reflexes brisk; BMI {n2}""",
    "vital2": """looks tired; ankles puffy; no rash; pulse {n2}; glucose {n1}.{d}; gait
unsteady; pale""",
    "plan": """recheck on {date}; x-ray; bloods; physio; review in 2 weeks; refer to cardiology;
ECG; sick note to {date}; counselling; swab sent; start {med} {dose}; no antibiotics; ultrasound
booked; ring {phone} with results; scan on {date}; dietician; smear due; safety-netted; wean off
{med}""",
    "kin_news": """is dying; has left; drinks; rang twice; is pregnant; lost the baby; is in
prison; hits {him}; does the cooking; won't visit; has dementia; pays the rent; is the carer;
worries; does not know; moved back in; came along; wants custody; called from {city}""",
    "pet_news": """died {date}; bit {him}; sleeps on the bed; had a litter; keeps {him} walking;
is with {kinname} now; sets off the wheeze; eats better than {he} does""",
    "phone_note": "after six; ask for {kinname}; no messages; not at work; text first; line is bad",
    "hour": "8.15; 9.40; 10.05; 11.30; 12.20; 2.10; 3.45; 4.55; 5.25",
}
